from __future__ import annotations

from oomguard.scan.inputs import layouts, writer_of

UID = "0b5cf621-1f52-4d3c-9b8f-2f6e0f1c9a11"


def test_the_path_tells_who_wrote_a_log():
    for path, layout, words in [
        (
            f"/var/log/pods/prod_llm-7d4_{UID}/engine/0.log",
            "kubernetes",
            "pod prod/llm-7d4 container engine",
        ),
        (
            f"prod_llm-7d4_{UID}/engine/2.log.20261120-101112.gz",
            "kubernetes",
            "pod prod/llm-7d4 container engine",
        ),
        (
            f"s3://logs/a/prod_llm-7d4_{UID}/engine/1.log",
            "kubernetes",
            "pod prod/llm-7d4 container engine",
        ),
        (
            f"/var/log/containers/llm-7d4_prod_engine-{'ab' * 32}.log",
            "kubernetes",
            "pod prod/llm-7d4 container engine",
        ),
        (
            f"/tmp/ray/session_2026-11-20_10-00-00_123456_77/logs/worker-{'ab' * 28}-01000000-991.err",
            "ray",
            "job 01000000",
        ),
        ("n3/session_2026-11-20_10-00-00_123456_77/logs/raylet.out", "ray", "node n3 raylet"),
        ("/tmp/ray/session_latest/logs/job-driver-raysubmit_x7.log", "ray", "job raysubmit_x7"),
        ("slurm-812.out", "slurm", "job 812"),
        ("jobs/slurm-812_7.out", "slurm", "job 812_7"),
        ("slurm-78.out-20261120", "slurm", "job 78"),
        ("slurm-78_2.out-20261120.gz", "slurm", "job 78_2"),
        ("slurm-78.out.1", "slurm", "job 78"),
        ("slurm-78.out.bak", None, ""),
        ("slurm-812_7-gpu-a-3.out", "slurm", "node gpu-a-3 job 812_7"),
        ("slurm-812-gpu-a-3_0.out", "slurm", "node gpu-a-3 job 812 rank 0"),
        ("logs/run7_x1b2c3d4/attempt_0/3/stderr.log", "torchrun", "job run7 rank 3"),
        ("error.log", None, ""),
        ("prod_llm/0.log", None, ""),
        ("slurm.out", None, ""),
    ]:
        writer = writer_of(path)
        assert (writer.layout, writer.words) == (layout, words), (path, layout, words)


def test_each_layout_says_where_it_was_read():
    assert {layout.name for layout in layouts()} == {"kubernetes", "ray", "torchrun", "slurm"}

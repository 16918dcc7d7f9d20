"""The examples for Kubernetes and SLURM: valid by Kubernetes' own schemas, and what they call is there."""

from __future__ import annotations

import re
import subprocess
import tomllib
from pathlib import Path

import kubernetes_validate
import pytest
import yaml

from support.each import each
from support.supervising import RUN, wait_for

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples" / "kubernetes"
MANIFESTS = sorted(FOLDER.glob("*.yaml"))
VERSIONS = ("1.31", "1.34")
STATUSES = tomllib.loads((ROOT / "oomguard" / "cluster" / "statuses.toml").read_text())["statuses"]
ENTRY = re.search(r"^ENTRYPOINT (\[.*\])$", (FOLDER / "Dockerfile").read_text(), re.MULTILINE)[1]


def pod_of(path: Path) -> dict:
    return yaml.safe_load(path.read_text())["spec"]["template"]["spec"]


def commands() -> list[list[str]]:
    pods = [pod_of(path) for path in MANIFESTS]
    containers = [one for pod in pods for one in (*pod["initContainers"], *pod["containers"])]
    return [one.get("command", yaml.safe_load(ENTRY)) + one.get("args", []) for one in containers]


@each("version", VERSIONS)
@each("path", MANIFESTS)
def test_a_manifest_is_valid_by_the_schemas_of_kubernetes(path, version):
    kubernetes_validate.validate(yaml.safe_load(path.read_text()), version, strict=True)


def test_a_manifest_with_a_field_that_does_not_exist_is_told():
    manifest = yaml.safe_load(MANIFESTS[0].read_text())
    manifest["spec"]["templat"] = {}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(manifest, VERSIONS[0], strict=True)


@pytest.mark.parametrize(
    "words", [words for words in commands() if words[1] == "run"], ids=lambda words: words[-1]
)
def test_the_options_of_run_in_a_manifest_are_taken(words, tmp_path):
    options = words[2 : words.index("--")]
    if "--probes" in options:
        options[options.index("--probes") + 1] = "0"
    ran = subprocess.run(
        [*RUN, *options, "--", "true"], capture_output=True, text=True, timeout=60, check=False
    )
    assert (ran.returncode, "left out" in ran.stderr) == (0, False), ran.stderr


@pytest.mark.parametrize(("memory", "status"), [("80GiB", 0), ("16GiB", 1)])
@pytest.mark.parametrize(
    "words", [words for words in commands() if words[1] == "plan"], ids=lambda words: words[3]
)
def test_the_init_container_ends_with_1_where_it_does_not_fit(words, memory, status):
    config = str(ROOT / "examples" / "models" / "llama-3.1-8b.json")
    asked = [config if word == "/models/8b" else word for word in words[2:]]
    plan = [*RUN[:-1], "plan", *asked, "--gpu-memory", memory]
    assert subprocess.run(plan, capture_output=True, timeout=60, check=False).returncode == status


def test_the_policy_of_the_job_knows_the_statuses():
    policy = yaml.safe_load((FOLDER / "job.yaml").read_text())["spec"]["podFailurePolicy"]["rules"]
    acted = {
        rule["action"]: rule["onExitCodes"]["values"]
        for rule in policy[1:]
        if "onExitCodes" in rule
    }
    assert acted == {"FailJob": [STATUSES["out_of_memory"]], "Ignore": [STATUSES["device_held"]]}


def test_the_page_names_the_files():
    page = (ROOT / "docs" / "how-to" / "fleet.md").read_text(encoding="utf-8")
    for path in (*MANIFESTS, FOLDER / "Dockerfile", ROOT / "examples" / "slurm" / "serve.sh"):
        assert f"{path.name}`" in page, path.name


@pytest.mark.xdist_group("slurm")
@pytest.mark.parametrize(("memory", "state"), [("80GiB", "COMPLETED"), ("16GiB", "FAILED")])
def test_task_prolog_keeps_a_step_off_a_node_without_room(slurm, memory, state):
    config = ROOT / "examples" / "models" / "llama-3.1-8b.json"
    prolog = ROOT / "examples" / "slurm" / "task_prolog.sh"
    job = slurm.submit(
        f"#!/bin/bash\nexport OOMGUARD_FITS='{config} --max-model-len 32768 --gpu-memory {memory}'\n"
        f"srun --task-prolog={prolog} echo the step runs\n"
    )
    slurm.wait_for(job, state)
    said = slurm.output(job)
    assert ("the step runs" in said) == (state == "COMPLETED"), said
    assert ("does not fit" in said) == (state == "FAILED"), said


@pytest.mark.xdist_group("slurm")
def test_batch_script_serves_until_the_signal_before_the_limit(slurm):
    config = ROOT / "examples" / "models" / "llama-3.1-8b.json"
    vllm = slurm.folder / "bin" / "vllm"
    vllm.write_text(
        "#!/bin/bash\necho it serves\ntrap 'echo it stops; exit 0' TERM\nwhile :; do sleep 0.1; done\n"
    )
    vllm.chmod(0o755)
    script = (ROOT / "examples" / "slurm" / "serve.sh").read_text()
    script = script.replace("#SBATCH --gpus=1\n", "").replace(
        'serve "$MODEL" >&2', 'serve "$MODEL" --gpu-memory 80GiB >&2'
    )
    job = slurm.submit(
        script.replace("#SBATCH --requeue", f"#SBATCH --requeue\nexport MODEL={config}")
    )
    assert wait_for(lambda: "it serves" in slurm.output(job), 60), slurm.output(job)
    slurm.ask("scancel", "--batch", "--signal=TERM", job)
    slurm.wait_for(job, "COMPLETED")
    assert "it stops" in slurm.output(job)

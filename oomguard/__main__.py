"""The program: ``oomguard``, and ``python -m oomguard``, which is the same."""

from oomguard.clean_start import leave_working_directory


def main() -> None:
    """Run the command line; from here on nothing is imported from the working directory."""
    try:
        leave_working_directory()
        from oomguard.cli import main as run

        run()
    except KeyboardInterrupt:  # before a sub-command takes care of it
        raise SystemExit(130) from None


if __name__ == "__main__":
    main()

"""The command ``oncely``."""


def main() -> None:
    """Run the command line. It is imported here, so that ``python -m`` can correct the path."""
    from oncely.cli import verbs

    verbs.main()

"""``python -m oncely.cli``."""

from oncely.cli.app import main

main()

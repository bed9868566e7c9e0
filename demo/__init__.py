"""The demo: real flights, real servers, real faults, and a count by somebody who trusts nobody.

Run from the repository's root by ``make demo`` or ``python -m demo``.
"""

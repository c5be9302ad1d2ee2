"""``kueue doctor``: measures this machine (`*_facts`), judges what was measured (`*_verdict`), says what to type."""

LIMIT_SECONDS = 10.0
"""All probes together have ended by then, whatever hangs."""

"""``kueue doctor``: measures this machine (`*_facts`), judges what was measured (`*_verdict`), says what to type."""

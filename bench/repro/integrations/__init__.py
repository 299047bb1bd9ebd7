"""Somebody else's trainers on our functions: cases, and their runner (`python -m bench.repro.integrations`)."""

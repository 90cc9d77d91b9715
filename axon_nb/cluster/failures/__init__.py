"""How failures are worded, and which ranks are available: deaths, health, hints, reports."""

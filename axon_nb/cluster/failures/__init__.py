"""How failures read: deaths, health, hints."""

"""Tests of the site in docs/."""

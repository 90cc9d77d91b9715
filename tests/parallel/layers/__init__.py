"""Layers and attention that are split over ranks."""

"""The view of a running cell: the activity strip and its saved page."""

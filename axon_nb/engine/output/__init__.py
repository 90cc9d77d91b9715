"""What processes of a rank write: streams, budgets, children, errors that are shown and swallowed."""

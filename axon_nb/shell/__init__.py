"""What a notebook and its ranks have in common as IPython shells; nothing here imports torch before it is needed."""

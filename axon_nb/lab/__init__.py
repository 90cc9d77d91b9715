"""The panel in JupyterLab and Notebook 7: a Jupyter server extension, and the page's part in `labextension`."""

"""Programs outside the notebook: `axon-nb status`, `run` and so on, and the MCP server `axon-nb mcp`."""

"""What tests of several folders share: kernels, ranks, scripts, agents, browser pages."""

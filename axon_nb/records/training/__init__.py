"""Records of a training job: metrics, progress, pipeline steps."""

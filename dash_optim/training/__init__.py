"""The training job: model, data, loop, checkpoints and metrics."""

"""The versioned weight-sync channel from the learner to the generators."""

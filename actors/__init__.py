"""The processes of a run, in the order a rollout meets them."""

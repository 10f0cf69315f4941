"""The rollout store: groups by uid, the staleness bound, and the ledger."""

"""The whole loop on a tiny model with real conversations, as one job."""

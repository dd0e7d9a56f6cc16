"""Where GPUs come from: each provider is a market (pure: what there is, when, at which price) and a launcher."""

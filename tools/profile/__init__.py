"""`graphrt run --profile`: where a run's time goes."""

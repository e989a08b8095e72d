"""What `graphrt run` says of sampling: its flags, log-probabilities, and several texts of one prompt."""

"""Parts of `graphrt bench`: models and ops timed beside ceilings and peers, once their results are right."""

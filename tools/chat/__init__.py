"""What `graphrt chat` is made of: a conversation, its commands, and what it is seen through."""

"""What `bench transport` sends its requests by: one file per family, each carrier with its server and its client."""

"""What a run in CI owes: demands on it that fail it, and reports for those who were not watching."""

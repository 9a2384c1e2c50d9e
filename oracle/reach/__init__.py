"""What cases reach, by kind: the parts of ``oracle.buckets``."""

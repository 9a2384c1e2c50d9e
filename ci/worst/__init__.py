"""``kdafuzz worst``: how near implementations come to their bounds, and what a looser bound would say."""

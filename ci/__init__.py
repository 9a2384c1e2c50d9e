"""The ``kdafuzz`` command and what it is made of."""

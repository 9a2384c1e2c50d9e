"""What every implementation must compute, in double precision, and the judgement of what one did compute."""

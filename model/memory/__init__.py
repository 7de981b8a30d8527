"""The options for how layers run and what is kept between forward and backward, and the loops over
chunks of tokens and over layers from which runners are built."""

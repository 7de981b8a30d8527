"""The options of how layers run and what is kept between forward and backward, and the loops over
chunks of tokens and over layers that runners are made of."""

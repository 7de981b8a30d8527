"""What is kept between forward and backward, and in which pieces a layer runs."""

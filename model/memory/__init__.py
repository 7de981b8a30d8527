"""What is kept between forward and backward, and in how many pieces a layer runs."""

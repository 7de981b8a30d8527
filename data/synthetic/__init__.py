"""Generated texts to practise and test retrieval in long contexts, split into training and test."""

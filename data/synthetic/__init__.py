"""Texts that are generated to practise and to test retrieval in long contexts, split between training and evaluation."""

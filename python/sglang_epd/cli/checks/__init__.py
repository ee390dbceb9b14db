"""What `sglang-epd doctor` looks at, a file a subject. A check is a function that yields
findings and raises nothing; whatever it asks has a deadline."""

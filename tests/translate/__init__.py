"""What each translation promises."""

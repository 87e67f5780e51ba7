"""The wheel as users have it: installed alone in a fresh environment, and used far from this checkout."""

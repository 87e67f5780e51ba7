"""What makes a site of the pages in `docs/`: they stay plain Markdown, and their code is run when the site is built."""

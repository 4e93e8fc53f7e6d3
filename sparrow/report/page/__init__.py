"""One page for runs: what is on it, apart from how it is written (HTML with SVG, or Markdown)."""

"""What the command shows: data in, text and tables out."""

"""Tables, figures and the HTML page, from result tables only."""

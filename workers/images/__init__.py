"""Images of records: pictures, and the tokens of a prompt where the model reads them."""

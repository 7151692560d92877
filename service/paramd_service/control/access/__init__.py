"""Users' tokens: what each role may do, which route needs what, who a token belongs to."""

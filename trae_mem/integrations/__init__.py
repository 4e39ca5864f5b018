"""How other libraries and trae_mem meet; each is imported only when it is used."""

"""Small cases of other libraries under convert_model and build, for tools/check_libraries.py."""

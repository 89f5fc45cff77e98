package grammar

// AnyJSON is GBNF for any JSON object: what response_format "json_object" asks for.
func AnyJSON() string { return "" }

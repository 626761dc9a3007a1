package tool

import (
	"slices"

	"github.com/santhosh-tekuri/jsonschema/v6"
)

// loops reports whether some schema under root comes back to itself on the
// same value, as {"$ref": "#"} does: no argument could ever fit it. Coming
// back on a part of the value is fine.
func loops(root *jsonschema.Schema) bool {
	done := map[*jsonschema.Schema]bool{} // false: still on the way down
	var circular func(*jsonschema.Schema) bool
	circular = func(s *jsonschema.Schema) bool {
		if finished, seen := done[s]; seen {
			return !finished
		}
		done[s] = false
		if slices.ContainsFunc(onSameValue(s), circular) {
			return true
		}
		done[s] = true
		return false
	}
	seen := map[*jsonschema.Schema]bool{}
	var visit func(*jsonschema.Schema) bool
	visit = func(s *jsonschema.Schema) bool {
		if seen[s] {
			return false
		}
		seen[s] = true
		return circular(s) || slices.ContainsFunc(onSameValue(s), visit) || slices.ContainsFunc(onParts(s), visit)
	}
	return visit(root)
}

// onSameValue are the schemas that s applies to the value itself.
func onSameValue(s *jsonschema.Schema) []*jsonschema.Schema {
	all := []*jsonschema.Schema{s.Ref, s.Not, s.If, s.Then, s.Else}
	all = slices.Concat(all, s.AllOf, s.AnyOf, s.OneOf)
	for _, d := range s.DependentSchemas {
		all = append(all, d)
	}
	for _, d := range s.Dependencies {
		all = appendSchemas(all, d)
	}
	return present(all)
}

// onParts are the schemas that s applies to members and elements.
func onParts(s *jsonschema.Schema) []*jsonschema.Schema {
	all := []*jsonschema.Schema{s.PropertyNames, s.UnevaluatedProperties, s.Contains, s.Items2020, s.UnevaluatedItems, s.ContentSchema}
	all = append(all, s.PrefixItems...)
	for _, p := range s.Properties {
		all = append(all, p)
	}
	for _, p := range s.PatternProperties {
		all = append(all, p)
	}
	for _, either := range []any{s.AdditionalProperties, s.Items, s.AdditionalItems} {
		all = appendSchemas(all, either)
	}
	return present(all)
}

// appendSchemas appends what a field of several types holds.
func appendSchemas(all []*jsonschema.Schema, field any) []*jsonschema.Schema {
	switch f := field.(type) {
	case *jsonschema.Schema:
		return append(all, f)
	case []*jsonschema.Schema:
		return append(all, f...)
	}
	return all
}

func present(all []*jsonschema.Schema) []*jsonschema.Schema {
	return slices.DeleteFunc(all, func(s *jsonschema.Schema) bool { return s == nil })
}

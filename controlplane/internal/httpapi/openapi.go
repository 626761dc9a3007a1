package httpapi

import (
	_ "embed"
	"encoding/json"
	"fmt"
	"net/http"
	"sync"

	"github.com/labstack/echo/v4"
	"go.yaml.in/yaml/v4"
)

//go:embed openapi.yaml
var openapiYAML []byte

// openapiJSON is the description as JSON, made when it is first asked for.
var openapiJSON = sync.OnceValues(func() ([]byte, error) {
	var doc any
	if err := yaml.Unmarshal(openapiYAML, &doc); err != nil {
		return nil, fmt.Errorf("read openapi.yaml: %w", err)
	}
	return json.Marshal(doc)
})

func (s *Server) openapi(c echo.Context) error {
	doc, err := openapiJSON()
	if err != nil {
		return err
	}
	return c.Blob(http.StatusOK, "application/json", doc)
}

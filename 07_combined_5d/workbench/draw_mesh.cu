// The picture of --show-mesh: a row for each rank, with its places and its groups.
#include <iomanip>
#include <sstream>

#include "../mesh.h"

namespace pentatron {

constexpr std::array<const char*, 6> group_names = {"tensor",  "context",         "pipeline", "gradients",
                                                    "experts", "expert gradients"};  // all but MeshGroup::all

std::string draw_mesh(const MeshShape& shape) {
  std::ostringstream text;
  text << "tp " << shape.tp << " x cp " << shape.cp << " x dp " << shape.dp << " x pp " << shape.pp << " = "
       << shape.ranks() << " ranks, ep " << shape.ep
       << "\ngradients: data x context; gradient norm and loss: all ranks\n\nrank  tp cp dp pp";
  for (const char* name : group_names) text << "  " << std::setw(16) << std::left << name;
  for (int rank = 0; rank < shape.ranks(); ++rank) {
    const MeshCoordinates at = coordinates_of(shape, rank);
    text << std::right << "\n" << std::setw(4) << rank << "  ";
    for (const int coordinate : {at.tp, at.cp, at.dp, at.pp}) text << std::setw(2) << coordinate << " ";
    for (size_t group = 0; group < group_names.size(); ++group) {
      std::string members;
      for (const int member : members_of(shape, static_cast<MeshGroup>(group), rank))
        members += std::to_string(member) + " ";
      text << " " << std::setw(16) << std::left << members << " ";
    }
  }
  return text.str() + "\n";
}

}  // namespace pentatron
